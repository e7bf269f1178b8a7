"""Integrations with other libraries. A library is imported only by the module that is named after it."""
