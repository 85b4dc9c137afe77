"""The OpenAPI document: refusals and examples for every route."""
