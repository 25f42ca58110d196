"""Single cases: a script that reproduces a wrong answer of a check, and a check of inputs captured from a model."""
