"""The angles by which queries and keys are rotated."""
