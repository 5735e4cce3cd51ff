"""Job runners: execution of rows by a session, a remote server or Ray replicas."""
