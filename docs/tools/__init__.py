"""Programs that write the computed parts of the documentation."""
