"""Plans and node references as text, Mermaid and SVG."""
