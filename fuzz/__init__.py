"""Fuzz targets: what reads files and bytes of strangers must refuse them in an orderly way."""
