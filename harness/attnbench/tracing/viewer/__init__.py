"""A viewer of traces: TensorBoard with the plug-in torch-tb-profiler, modified to work offline."""
