"""Acceptance tests of attnbench's promises, with limits fixed in advance. Some compare attnbench with other tools."""
