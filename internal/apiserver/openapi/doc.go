// Package openapi holds the generated OpenAPI definitions of every type that the API serves. `make generate` writes it.
package openapi
