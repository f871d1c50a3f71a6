package main

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"

	"github.com/cosi-project/runtime/pkg/resource"
	"github.com/cosi-project/runtime/pkg/state"
	"github.com/siderolabs/talos/pkg/machinery/resources/network"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	applycorev1 "k8s.io/client-go/applyconfigurations/core/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
	"github.com/talos-ccm/talos-ccm/pkg/talosapi"
)

// Names of the baselines. Both write to Nodes what talos-ccm writes, approve all CSRs, and check nothing.
const (
	// writesOnly talks to no machine: it knows what simulated machines have.
	writesOnly = "writes only"
	// readsAndWrites watches of each machine what it writes to the Node.
	readsAndWrites = "reads and writes"
)

var baselines = []string{writesOnly, readsAndWrites}

// watchedKinds are those of platform metadata and addresses.
var watchedKinds = []resource.Kind{
	resource.NewMetadata(runtime.NamespaceName, runtime.PlatformMetadataType, "", resource.VersionUndefined),
	resource.NewMetadata(network.NamespaceName, network.AddressStatusType, "", resource.VersionUndefined),
}

type baseline struct {
	name   string
	client kubernetes.Interface
	tls    *tls.Config
}

// TLSConfig implements talosapi.Credentials.
func (b *baseline) TLSConfig() (*tls.Config, error) { return b.tls.Clone(), nil }

// runBaseline reads the environment variables KUBECONFIG and TALOSCONFIG and runs until ctx ends.
func runBaseline(ctx context.Context, name string) error {
	kubeconfig, err := clientcmd.BuildConfigFromFlags("", os.Getenv("KUBECONFIG"))
	if err != nil {
		return err
	}

	kubeconfig.QPS = -1
	kubeconfig.ContentType = "application/vnd.kubernetes.protobuf"

	b := &baseline{name: name}
	if b.client, err = kubernetes.NewForConfig(kubeconfig); err != nil {
		return err
	}

	if b.tls, err = (talosapi.Talosconfig{Path: os.Getenv("TALOSCONFIG")}).TLSConfig(); err != nil {
		return err
	}

	factory := informers.NewSharedInformerFactory(b.client, 0)

	for _, informer := range []cache.SharedIndexInformer{
		factory.Core().V1().Nodes().Informer(), factory.Certificates().V1().CertificateSigningRequests().Informer(),
	} {
		if _, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{AddFunc: func(obj any) { b.observe(ctx, obj) }}); err != nil {
			return err
		}
	}

	factory.Start(ctx.Done())
	<-ctx.Done()
	factory.Shutdown()

	return nil
}

// observe initializes a new Node, and approves a new CSR.
func (b *baseline) observe(ctx context.Context, obj any) {
	switch obj := obj.(type) {
	case *corev1.Node:
		go func() {
			if b.name == writesOnly {
				exitOnError(b.initialize(ctx, obj, platform(obj.Name), nodeAddresses(obj)))
			} else {
				exitOnError(b.follow(ctx, obj))
			}
		}()
	case *certificatesv1.CertificateSigningRequest:
		if obj.Spec.SignerName == certificatesv1.KubeletServingSignerName && len(obj.Status.Conditions) == 0 {
			go func() { exitOnError(b.approve(ctx, obj.DeepCopy())) }()
		}
	}
}

// exitOnError ends the process: without one Node, all results would be wrong.
func exitOnError(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func (b *baseline) approve(ctx context.Context, csr *certificatesv1.CertificateSigningRequest) error {
	csr.Status.Conditions = append(csr.Status.Conditions, certificatesv1.CertificateSigningRequestCondition{
		Type: certificatesv1.CertificateApproved, Status: corev1.ConditionTrue, Reason: "Baseline",
	})

	_, err := b.client.CertificatesV1().CertificateSigningRequests().UpdateApproval(ctx, csr.Name, csr, metav1.UpdateOptions{})

	return err
}

// follow watches the machine of a Node and writes the Node.
func (b *baseline) follow(ctx context.Context, node *corev1.Node) error {
	st, err := talosapi.Dial(ctx, b, netip.MustParseAddr(node.Status.Addresses[0].Address))
	if err != nil {
		return err
	}
	defer st.Close() //nolint:errcheck // no call is in flight

	events := make(chan state.Event)

	for _, kind := range watchedKinds {
		go func() { exitOnError(st.WatchKind(ctx, kind, events, state.WithBootstrapContents(true))) }()
	}

	var (
		missing  = len(watchedKinds) // whose existing resources have not been read
		metadata *runtime.PlatformMetadataSpec
		ips      []netip.Addr
	)

	for event := range events {
		switch r := event.Resource.(type) {
		case *runtime.PlatformMetadata:
			metadata = r.TypedSpec()
		case *network.AddressStatus:
			// All addresses of a simulated machine are those of its Node, also the loopback address where it listens.
			ips = append(ips, r.TypedSpec().Address.Addr())
		}

		switch {
		case event.Type == state.Errored:
			return event.Error
		case event.Type == state.Bootstrapped:
			if missing--; missing == 0 {
				err = b.initialize(ctx, node, metadata, ips)
			}
		case missing == 0:
			err = b.patchAddresses(ctx, node.Name, ips)
		}

		if err != nil {
			return err
		}
	}

	return nil
}

// initialize makes the same three writes as talos-ccm.
func (b *baseline) initialize(ctx context.Context, node *corev1.Node, m *runtime.PlatformMetadataSpec, ips []netip.Addr) error {
	labels := applycorev1.Node(node.Name).WithLabels(map[string]string{
		corev1.LabelTopologyRegion: m.Region, corev1.LabelTopologyZone: m.Zone, corev1.LabelInstanceTypeStable: m.InstanceType,
		corev1.LabelFailureDomainBetaRegion: m.Region, corev1.LabelFailureDomainBetaZone: m.Zone, corev1.LabelInstanceType: m.InstanceType,
	})

	if _, err := b.client.CoreV1().Nodes().Apply(ctx, labels, metav1.ApplyOptions{FieldManager: "baseline", Force: true}); err != nil {
		return err
	}

	if err := b.patchAddresses(ctx, node.Name, ips); err != nil {
		return err
	}

	taints, err := json.Marshal(slices.DeleteFunc(slices.Clone(node.Spec.Taints), nodespec.IsUninitializedTaint))
	if err != nil {
		return err
	}

	spec := fmt.Sprintf(`{"spec":{"providerID":%q,"taints":%s}}`, m.ProviderID, taints)
	_, err = b.client.CoreV1().Nodes().Patch(ctx, node.Name, types.MergePatchType, []byte(spec), metav1.PatchOptions{})

	return err
}

// patchAddresses writes the addresses of a Node.
func (b *baseline) patchAddresses(ctx context.Context, nodename string, ips []netip.Addr) error {
	// A merge by type, the default, fails if one address of a type moves.
	addresses := []string{`{"$patch":"replace"}`, fmt.Sprintf(`{"type":"Hostname","address":%q}`, nodename)}
	for _, ip := range ips {
		addresses = append(addresses, fmt.Sprintf(`{"type":"InternalIP","address":%q}`, ip.String()))
	}

	status := fmt.Sprintf(`{"status":{"addresses":[%s]}}`, strings.Join(addresses, ","))
	_, err := b.client.CoreV1().Nodes().PatchStatus(ctx, nodename, []byte(status))

	return err
}
