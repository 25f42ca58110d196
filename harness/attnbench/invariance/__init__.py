"""Is a query's answer the same to the last bit whatever else is computed in the same call, and what does that cost?"""
