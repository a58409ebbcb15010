"""What differs between two runs or configs: `lptune diff`. sides.py compares what the report reads."""
