package documents

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/emicklei/go-restful/v3"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	custombuilder "k8s.io/apiextensions-apiserver/pkg/controller/openapi/builder"
	"k8s.io/apiserver/pkg/server/mux"
	"k8s.io/apiserver/pkg/server/routes"
	"k8s.io/klog/v2"
	"k8s.io/kube-openapi/pkg/builder"
	"k8s.io/kube-openapi/pkg/common"
	"k8s.io/kube-openapi/pkg/common/restfuladapter"
	"k8s.io/kube-openapi/pkg/handler"
	"k8s.io/kube-openapi/pkg/handler3"
	"k8s.io/kube-openapi/pkg/spec3"
	"k8s.io/kube-openapi/pkg/validation/spec"
)

// v2 is how the one document of version 2 is made.
func (d *Documents) v2() recipe {
	definitions := d.custom()
	return recipe{
		name: v2Path, version: version(definitions), protobuf: guarded(handler.ToProtoBinary),
		json: func() ([]byte, error) {
			built, err := d.buildV2(definitions)
			if err != nil {
				return nil, err
			}
			return built.MarshalJSON()
		},
	}
}

func (d *Documents) buildV2(definitions []*apiextensionsv1.CustomResourceDefinition) (*spec.Swagger, error) {
	config := *d.from.V2 // the builder fills in what is missing
	own, err := builder.BuildOpenAPISpecFromRoutes(restfuladapter.AdaptWebServices(d.from.Services()), &config)
	if err != nil {
		return nil, err
	}
	own.Definitions = handler.PruneDefaults(own.Definitions)
	var others []*spec.Swagger
	for _, definition := range definitions {
		other, err := customV2(definition)
		if err != nil {
			klog.ErrorS(err, "definition could not be described in OpenAPI, it is left out", "definition", definition.Name)
			continue
		}
		others = append(others, other)
	}
	if len(others) == 0 {
		return own, nil
	}
	return custombuilder.MergeSpecs(own, others...)
}

// customV2 describes a definition in all its versions.
func customV2(definition *apiextensionsv1.CustomResourceDefinition) (_ *spec.Swagger, err error) {
	defer recovered(&err)
	merged := &spec.Swagger{}
	for _, v := range definition.Spec.Versions {
		if !v.Served {
			continue
		}
		one, err := custombuilder.BuildOpenAPIV2(definition, v.Name, custombuilder.Options{V2: true, IncludeSelectableFields: true})
		if err != nil {
			return nil, err
		}
		// As in what they are merged with: schemas that differ would be there twice.
		one.Definitions = handler.PruneDefaults(one.Definitions)
		if merged, err = custombuilder.MergeSpecs(merged, one); err != nil {
			return nil, err
		}
	}
	return merged, nil
}

// v3 are how the documents of version 3 are made, in the order of their names. Of a group version that the server serves
// itself, definitions add nothing.
func (d *Documents) v3() []recipe {
	out := map[string]recipe{}
	for groupVersion, definitions := range byGroupVersion(d.custom()) {
		name := v3Path + "/apis/" + groupVersion
		out[name] = recipe{
			name: name, version: version(definitions), protobuf: guarded(handler3.ToV3ProtoBinary),
			json: func() ([]byte, error) { return customV3(definitions, groupVersion) },
		}
	}
	for _, service := range d.from.Services() {
		name := v3Path + service.RootPath()
		out[name] = recipe{
			name: name, protobuf: guarded(handler3.ToV3ProtoBinary),
			json: func() ([]byte, error) { return d.buildV3(service) },
		}
	}
	return slices.SortedFunc(maps.Values(out), func(a, b recipe) int { return strings.Compare(a.name, b.name) })
}

func byGroupVersion(definitions []*apiextensionsv1.CustomResourceDefinition) map[string][]*apiextensionsv1.CustomResourceDefinition {
	out := map[string][]*apiextensionsv1.CustomResourceDefinition{}
	for _, definition := range definitions {
		for _, v := range definition.Spec.Versions {
			if v.Served {
				groupVersion := definition.Spec.Group + "/" + v.Name
				out[groupVersion] = append(out[groupVersion], definition)
			}
		}
	}
	return out
}

// customV3 describes the definitions of a group version.
func customV3(definitions []*apiextensionsv1.CustomResourceDefinition, groupVersion string) (_ []byte, err error) {
	defer recovered(&err)
	_, version, _ := strings.Cut(groupVersion, "/")
	var parts []*spec3.OpenAPI
	for _, definition := range definitions {
		part, err := custombuilder.BuildOpenAPIV3(definition, version, custombuilder.Options{IncludeSelectableFields: true})
		if err != nil {
			klog.ErrorS(err, "definition could not be described in OpenAPI, it is left out", "definition", definition.Name, "version", version)
			continue
		}
		parts = append(parts, part)
	}
	merged, err := custombuilder.MergeSpecsV3(parts...)
	if err != nil {
		return nil, err
	}
	return json.Marshal(merged)
}

// buildV3 has the library make the document of one web service. It offers no more than to install documents in a server:
// so it does, in one that nobody sees.
func (d *Documents) buildV3(service *restful.WebService) ([]byte, error) {
	config := *d.from.V3
	config.Definitions = d.sharedDefinitions()
	container := restful.NewContainer()
	container.Add(service)
	made := routes.OpenAPI{V3Config: &config}.InstallV3(container, mux.NewPathRecorderMux("openapi"))
	answer := &recorder{header: http.Header{}}
	made.HandleGroupVersion(answer, &http.Request{
		Method: http.MethodGet, URL: &url.URL{Path: v3Path + service.RootPath()}, Header: http.Header{"Accept": {jsonType}},
	})
	if answer.body.Len() == 0 {
		return nil, errors.New("the library builds none") // and has logged why
	}
	return answer.body.Bytes(), nil
}

// sharedDefinitions are the schemas of all types, for documents of version 3. Only who builds calls it.
func (d *Documents) sharedDefinitions() map[string]common.OpenAPIDefinition {
	d.mu.Lock()
	made := d.definitions
	d.mu.Unlock()
	if made != nil {
		return made
	}
	made = d.from.V3.GetDefinitions(func(name string) spec.Ref {
		name, _ = d.from.V3.GetDefinitionName(name)
		return spec.MustCreateRef("#/components/schemas/" + common.EscapeJsonPointer(name))
	})
	d.mu.Lock()
	defer d.mu.Unlock()
	d.definitions = made
	return made
}

// recorder takes an answer.
type recorder struct {
	header http.Header
	body   bytes.Buffer
}

func (r *recorder) Header() http.Header            { return r.header }
func (r *recorder) WriteHeader(int)                {}
func (r *recorder) Write(data []byte) (int, error) { return r.body.Write(data) }

// guarded encodes with a library that gets what users wrote.
func guarded(encode func([]byte) ([]byte, error)) func([]byte) ([]byte, error) {
	return func(data []byte) (_ []byte, err error) {
		defer recovered(&err)
		return encode(data)
	}
}

// recovered makes an error of a panic. Definitions are users': what the libraries make of one must not cost them the
// documents of all others.
func recovered(err *error) {
	if p := recover(); p != nil {
		*err = fmt.Errorf("panic: %v", p)
	}
}
