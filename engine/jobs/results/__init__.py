"""What a job leaves behind: parts that are committed one by one, and what is known of each."""
