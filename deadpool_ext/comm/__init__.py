"""Communicators that are replaced in place: process groups keep their handles while what is inside them changes."""
