"""Is what `retime advise` says worth following: training by its advice, against the strongest plain step."""
