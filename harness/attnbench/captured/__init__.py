"""Cases on their own: a script for a wrong answer of a check, and a check of inputs that a model was given."""
