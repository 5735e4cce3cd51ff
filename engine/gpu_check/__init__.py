"""One script that proves on a card what everything else only proves on a fake of one."""
