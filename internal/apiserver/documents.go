package apiserver

import (
	"slices"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/labels"
	genericserver "k8s.io/apiserver/pkg/server"

	"portal/internal/apiserver/documents"
)

// serveDocuments serves the OpenAPI documents, instead of k8s.io/apiserver. It comes after all resources are installed.
func (s *Server) serveDocuments(config *genericserver.Config) {
	// All schemas were needed to install resources. From now on they are made when somebody asks for a document.
	config.OpenAPIV3Config.Definitions = nil
	s.documented = documents.Sources{
		Services: s.generic.Handler.GoRestfulContainer.RegisteredWebServices,
		V2:       config.OpenAPIConfig, V3: config.OpenAPIV3Config, Custom: s.custom.served,
	}
	documents.New(s.documented).Install(s.generic.Handler.NonGoRestfulMux)
}

// served are the definitions that are established.
func (c *customResources) served() []*apiextensionsv1.CustomResourceDefinition {
	all, err := c.extensions.Informers.Apiextensions().V1().CustomResourceDefinitions().Lister().List(labels.Everything())
	if err != nil {
		return nil // a lister reads a cache, which does not fail
	}
	return slices.DeleteFunc(all, func(d *apiextensionsv1.CustomResourceDefinition) bool { return !established(d) })
}
