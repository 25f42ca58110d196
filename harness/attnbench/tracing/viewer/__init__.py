"""A viewer of traces: TensorBoard with the plug-in torch-tb-profiler, made to draw without the internet."""
