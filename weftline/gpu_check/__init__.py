"""GPU validation script: proves on a real GPU what the tests show on a fake one."""
