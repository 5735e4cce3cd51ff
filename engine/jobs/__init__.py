"""Jobs: a pipeline run over a data set, row by row or block by block, exactly once each."""
