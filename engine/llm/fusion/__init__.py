"""A loaded decoder made quicker without changing what it says."""
