"""Job reporting: live progress, the summary and the HTML report."""
