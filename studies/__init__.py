"""Studies that validate the method of attnbench. They are not part of the installed package."""
