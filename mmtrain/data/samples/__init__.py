"""One sample: its record's format, its template, its tokens and labels."""
