package apiserver

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apiserver/pkg/authentication/authenticator"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/klog/v2"

	"portal/internal/apiserver/registry/serviceaccount"
	"portal/internal/apiserver/tokens"
)

// admissionPlugins are those that can be turned on and off.
var admissionPlugins = []string{serviceaccount.AdmissionName}

// objects reads objects where the API itself keeps them: from the watch cache, or by quorum from etcd.
type objects map[string]rest.Getter

// connect takes the storage of a resource of the core group.
func (o objects) connect(version schema.GroupVersion, path string, storage rest.Storage) {
	if getter, ok := storage.(rest.Getter); ok && version == corev1.SchemeGroupVersion {
		o[path] = getter
	}
}

// get is a tokens.Getter.
func (o objects) get(ctx context.Context, resource, namespace, name string, live bool) (metav1.Object, error) {
	getter, ok := o[resource]
	if !ok {
		return nil, fmt.Errorf("%s are not served", resource)
	}
	var opts metav1.GetOptions
	if !live {
		opts.ResourceVersion = "0"
	}
	obj, err := getter.Get(request.WithNamespace(ctx, namespace), name, &opts)
	if apierrors.IsNotFound(err) { // the store names the resource of the request
		return nil, apierrors.NewNotFound(corev1.Resource(resource), name)
	}
	if err != nil {
		return nil, err
	}
	return meta.Accessor(obj)
}

// openTokens makes what issues and checks tokens.
func (s *Server) openTokens(ctx context.Context) error {
	tokens.RegisterMetrics()
	if err := s.openTokenKeys(ctx); err != nil {
		return err
	}
	s.objects = objects{}
	s.issuer = &tokens.Issuer{Config: tokens.Config{
		Issuers: s.opts.Tokens.Issuers, Audiences: s.opts.Tokens.Audiences,
		MaxExpiration: s.opts.Tokens.MaxExpiration, Extend: s.opts.Tokens.Extend,
		Keys: s.tokenKeys.ring, Promise: s.tokenKeys.promise,
	}}
	s.certs.keys, s.certs.issuer = s.tokenKeys, s.opts.Tokens.Issuers[0]
	return nil
}

// accountTokens knows ServiceAccounts by their tokens.
func (s *Server) accountTokens() authenticator.Token {
	return &tokens.Authenticator{Config: &s.issuer.Config, Get: s.objects.get, Used: s.markUsed}
}

// markUsed labels a Secret with the day on which its token was used.
func (s *Server) markUsed(ctx context.Context, namespace, name string, uid types.UID, today string) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{
		"uid": uid, "labels": map[string]string{tokens.LastUsedLabel: today},
	}})
	if err == nil {
		_, err = s.client.CoreV1().Secrets(namespace).Patch(ctx, name, types.MergePatchType, patch, metav1.PatchOptions{})
	}
	if err != nil {
		klog.ErrorS(err, "use of a Secret's token could not be noted", "secret", klog.KRef(namespace, name))
	}
}

// serveDiscovery lets others verify tokens. An issuer that is no https URL has no discovery, as in Kubernetes.
func (s *Server) serveDiscovery() {
	if err := tokens.CheckIssuer(s.opts.Tokens.Issuers[0]); err != nil {
		klog.InfoS("issuer discovery of tokens is not served", "reason", err.Error())
		return
	}
	keys := s.opts.Tokens.KeysURI
	if keys == "" {
		keys = "https://" + s.externalAddress() + tokens.KeysPath
	}
	s.Handle(tokens.ConfigurationPath, s.issuer.Configuration(keys))
	s.Handle(tokens.KeysPath, s.issuer.KeySet())
}

// externalAddress is where others reach this server.
func (s *Server) externalAddress() string {
	listen := s.listener.Addr().(*net.TCPAddr).AddrPort().Addr().Unmap()
	for _, addr := range []netip.Addr{s.opts.advertise, listen} {
		if addr.IsValid() && !addr.IsUnspecified() {
			return net.JoinHostPort(addr.String(), strconv.Itoa(int(s.opts.port)))
		}
	}
	return net.JoinHostPort("127.0.0.1", strconv.Itoa(int(s.opts.port)))
}

// RootCA is what verifies this server's certificate, in PEM. It changes when the CA is rotated.
func (s *Server) RootCA() []byte { return s.certs.agreed() }
