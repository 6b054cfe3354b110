package apiserver

import (
	"context"
	"encoding/json"
	"fmt"
	"strconv"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"portal/internal/ensure"
	"portal/internal/reports"
)

const (
	definitionsPath = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
	// definitionRevision is the annotation that numbers the definition's revisions: a server replaces older ones.
	definitionRevision = "portal.dev/definition"
)

// nodeReports is the definition of NodeReports. It is no reason to wait for before the server is ready.
func (s *Server) nodeReports() ensure.Object {
	return ensure.Object{Name: "customresourcedefinition " + reports.DefinitionName, Ensure: s.ensureNodeReports}
}

// ensureNodeReports keeps the definition of NodeReports. One that an administrator has changed stays, until there is a newer one.
func (s *Server) ensureNodeReports(ctx context.Context) error {
	api := s.client.CoreV1().RESTClient()
	data, err := api.Get().AbsPath(definitionsPath, reports.DefinitionName).SetHeader("Accept", "application/json").Do(ctx).Raw()
	if apierrors.IsNotFound(err) {
		return ignoreRace(api.Post().AbsPath(definitionsPath).SetHeader("Content-Type", "application/json").Body(reports.Definition).Do(ctx).Error())
	}
	if err != nil {
		return err
	}
	var have, want apiextensionsv1.CustomResourceDefinition
	if err := json.Unmarshal(data, &have); err != nil {
		return fmt.Errorf("read the definition of NodeReports: %w", err)
	}
	if err := json.Unmarshal(reports.Definition, &want); err != nil {
		return err
	}
	if have.DeletionTimestamp != nil || revisionOf(&have) >= revisionOf(&want) {
		return nil // one that is being deleted comes back when it is gone
	}
	have.Spec = want.Spec
	if have.Annotations == nil {
		have.Annotations = map[string]string{}
	}
	have.Annotations[definitionRevision] = want.Annotations[definitionRevision]
	body, err := json.Marshal(&have)
	if err != nil {
		return err
	}
	return ignoreRace(api.Put().AbsPath(definitionsPath, reports.DefinitionName).SetHeader("Content-Type", "application/json").Body(body).Do(ctx).Error())
}

func revisionOf(definition *apiextensionsv1.CustomResourceDefinition) int {
	n, _ := strconv.Atoi(definition.Annotations[definitionRevision]) // 0: somebody else's
	return n
}
