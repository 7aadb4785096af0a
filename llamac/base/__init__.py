"""Parts that every package uses: errors, files, data types, random numbers, the compiled modules."""
