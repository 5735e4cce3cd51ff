"""Data sets as a job reads them: rows in a fixed order, from files, folders, archives and streams."""
