"""What pages are made of: tables, marks, figures as SVG and HTML, templates."""
