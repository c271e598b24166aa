"""Numbers as text, marks of Markdown, and what people read in a terminal."""
