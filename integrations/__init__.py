"""The mechanisms for other training libraries than Lightning."""
