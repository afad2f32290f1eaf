"""Production implementations under the same contract as those written by hand."""
