"""Measurements on an accelerator in lines of minutes, the most important first; README.md says how."""
