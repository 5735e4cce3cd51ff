"""Workers as the scheduler knows them: their states, deaths, sleep, and memory they share; pure."""
