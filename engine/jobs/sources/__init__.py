"""Data sources of jobs: files, folders, archives and streams as ordered rows."""
