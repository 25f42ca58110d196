"""How the method was validated: acceptance, detection power, and a simulated machine. Not part of the package."""
