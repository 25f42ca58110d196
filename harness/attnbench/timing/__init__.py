"""What is timed, when and in which order: blocks, visits, the race, predictions. A simulated clock can drive it."""
