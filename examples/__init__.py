"""Examples that use the package: tutorials, adapters for other packages, findings, and a workflow for CI."""
