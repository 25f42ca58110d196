"""What is timed, when and in which order: blocks, visits, the race, forecasts; a simulated clock can drive it all."""
