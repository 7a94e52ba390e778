"""One palette for matplotlib, SVG and CSS; tables for the terminal and the page."""
