package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/rest"

	"portal/internal/apiserver"
	"portal/internal/store"
)

// serverStorage is the storage of a running server, which does what it is asked.
type serverStorage struct {
	client *rest.RESTClient
	host   string
}

func askServer(kubeconfig string) (keeper, error) {
	config, err := apiConfig(kubeconfig)
	if err != nil {
		return nil, usageError{err}
	}
	client, err := serverClient(config)
	if err != nil {
		return nil, err
	}
	return serverStorage{client, config.Host}, nil
}

// Close is for a storage that was opened here.
func (s serverStorage) Close() {}

func (s serverStorage) Status(ctx context.Context) (store.Status, error) {
	return s.status(s.client.Get().AbsPath(apiserver.StoragePath).Do(ctx))
}

func (s serverStorage) Defragment(ctx context.Context) (store.Status, error) {
	return s.status(s.client.Post().AbsPath(apiserver.StoragePath + "/defrag").Do(ctx))
}

func (s serverStorage) status(result rest.Result) (out store.Status, err error) {
	body, err := result.Raw()
	if err != nil {
		return out, s.explain(err)
	}
	if err := json.Unmarshal(body, &out); err != nil {
		return out, fmt.Errorf("the answer of %s is no storage status: %w", s.host, err)
	}
	return out, nil
}

func (s serverStorage) Snapshot(ctx context.Context, to io.Writer) error {
	from, err := s.client.Get().AbsPath(apiserver.StoragePath + "/snapshot").Stream(ctx)
	if err != nil {
		return s.explain(err)
	}
	defer from.Close()
	if _, err := io.Copy(to, from); err != nil {
		return fmt.Errorf("read the snapshot from %s: %w", s.host, err)
	}
	return nil
}

// Reencrypt has the server rewrite, and passes on what it tells.
func (s serverStorage) Reencrypt(ctx context.Context, tell func(store.Reencryption)) (now store.Reencryption, err error) {
	from, err := s.client.Post().AbsPath(apiserver.StoragePath + "/reencrypt").Stream(ctx)
	if err != nil {
		return now, s.explain(err)
	}
	defer from.Close()
	for lines := json.NewDecoder(from); ; {
		now = store.Reencryption{}
		switch err := lines.Decode(&now); {
		case err != nil:
			return now, fmt.Errorf("%s stopped telling of its progress: %w", s.host, err)
		case now.Error != "":
			return now, errors.New(now.Error)
		case now.Done:
			return now, nil
		}
		tell(now)
	}
}

func (s serverStorage) explain(err error) error {
	if apierrors.IsNotFound(err) {
		return fmt.Errorf("the server at %s has no %s: it is not Portal's, or older than this command", s.host, apiserver.StoragePath)
	}
	return fmt.Errorf("ask the server at %s: %w", s.host, err)
}
