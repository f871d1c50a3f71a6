package bootstrap

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/yaml"
)

// applyManifests applies every document of the stream by server-side apply. It forces: these objects are ours, by their names.
func applyManifests(ctx context.Context, client kubernetes.Interface, stream []byte) error {
	documents := utilyaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(stream)))

	for {
		document, err := documents.Read()
		if errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return fmt.Errorf("read manifests: %w", err)
		}

		if err := apply(ctx, client, document); err != nil {
			return err
		}
	}
}

func apply(ctx context.Context, client kubernetes.Interface, document []byte) error {
	var object metav1.PartialObjectMetadata
	if err := yaml.Unmarshal(document, &object); err != nil {
		return fmt.Errorf("read manifest: %w", err)
	}

	force := true
	options := metav1.PatchOptions{FieldManager: fieldManager, Force: &force}

	var err error

	switch object.Kind {
	case "ServiceAccount":
		_, err = client.CoreV1().ServiceAccounts(object.Namespace).Patch(ctx, object.Name, types.ApplyPatchType, document, options)
	case "ClusterRole":
		_, err = client.RbacV1().ClusterRoles().Patch(ctx, object.Name, types.ApplyPatchType, document, options)
	case "ClusterRoleBinding":
		_, err = client.RbacV1().ClusterRoleBindings().Patch(ctx, object.Name, types.ApplyPatchType, document, options)
	case "Role":
		_, err = client.RbacV1().Roles(object.Namespace).Patch(ctx, object.Name, types.ApplyPatchType, document, options)
	case "RoleBinding":
		_, err = client.RbacV1().RoleBindings(object.Namespace).Patch(ctx, object.Name, types.ApplyPatchType, document, options)
	default:
		err = errors.New("no such kind here")
	}

	if err != nil {
		return fmt.Errorf("apply %s %s: %w", object.Kind, object.Name, err)
	}

	return nil
}
