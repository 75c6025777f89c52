"""What a model needs of its links, and which change makes it fit."""
