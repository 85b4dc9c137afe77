"""The REST API's paths, one module for each kind of thing. Each only translates between HTTP and ``api.jobs.service``."""
