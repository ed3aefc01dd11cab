"""Turning text into token ids: where documents come from, and the two vocabularies that need no download."""
