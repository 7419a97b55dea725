"""One engine each: thin, and blind to one another. What they share is `engine.session`."""
