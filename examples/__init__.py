"""Examples that use the package: tutorials, adapters for other packages, a workflow for CI."""
