"""The mathematics: pure functions on flat tensors, with torch alone."""
