"""Tools of the repository: the demo, its model and its data. Not part of the installed package."""
