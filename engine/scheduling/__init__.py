"""Who gets what, and when: requests, their steps, and what follows from each answer; pure."""
