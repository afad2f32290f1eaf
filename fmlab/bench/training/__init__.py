"""A whole training run of a family beside that of the library most people would use; see bench.trainers."""
