package main

import (
	"context"
	"crypto/tls"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"sync"

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
	cloudproviderapi "k8s.io/cloud-provider/api"

	"github.com/talos-ccm/talos-ccm/pkg/talosapi"
)

// barest is the least that a controller can do: it has as many watches as talos-ccm, writes what talos-ccm writes, and
// checks nothing.
type barest struct {
	client kubernetes.Interface
	tls    *tls.Config
	known  sync.Map // nodenames
}

// TLSConfig implements talosapi.Credentials.
func (b *barest) TLSConfig() (*tls.Config, error) { return b.tls.Clone(), nil }

// runBarest reads the environment variables KUBECONFIG and TALOSCONFIG and runs until ctx ends.
func runBarest(ctx context.Context) error {
	kubeconfig, err := clientcmd.BuildConfigFromFlags("", os.Getenv("KUBECONFIG"))
	if err != nil {
		return err
	}

	kubeconfig.QPS = -1
	kubeconfig.ContentType = "application/vnd.kubernetes.protobuf"

	b := &barest{}
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

// observe follows the machine of a new Node, and approves a new CSR.
func (b *barest) observe(ctx context.Context, obj any) {
	switch obj := obj.(type) {
	case *corev1.Node:
		if _, again := b.known.LoadOrStore(obj.Name, nil); !again {
			go func() { b.report(b.follow(ctx, obj)) }()
		}
	case *certificatesv1.CertificateSigningRequest:
		if obj.Spec.SignerName == certificatesv1.KubeletServingSignerName && len(obj.Status.Conditions) == 0 {
			go func() { b.report(b.approve(ctx, obj.DeepCopy())) }()
		}
	}
}

// report ends the process: without one Node, all results would be wrong.
func (b *barest) report(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func (b *barest) approve(ctx context.Context, csr *certificatesv1.CertificateSigningRequest) error {
	csr.Status.Conditions = append(csr.Status.Conditions, certificatesv1.CertificateSigningRequestCondition{
		Type: certificatesv1.CertificateApproved, Status: corev1.ConditionTrue, Reason: "Barest",
	})

	_, err := b.client.CertificatesV1().CertificateSigningRequests().UpdateApproval(ctx, csr.Name, csr, metav1.UpdateOptions{})

	return err
}

// follow watches the machine of a Node and writes the Node.
func (b *barest) follow(ctx context.Context, node *corev1.Node) error {
	address, err := netip.ParseAddr(node.Status.Addresses[0].Address)
	if err != nil {
		return err
	}

	st, err := talosapi.Dial(ctx, b, address)
	if err != nil {
		return err
	}
	defer st.Close() //nolint:errcheck // no call is in flight

	kinds := []resource.Kind{
		resource.NewMetadata(runtime.NamespaceName, runtime.PlatformMetadataType, "", resource.VersionUndefined),
		resource.NewMetadata(network.NamespaceName, network.AddressStatusType, "", resource.VersionUndefined),
		resource.NewMetadata(network.NamespaceName, network.HostnameStatusType, "", resource.VersionUndefined),
		resource.NewMetadata(network.NamespaceName, network.NodeAddressType, "", resource.VersionUndefined),
	}
	events := make(chan state.Event)

	for _, kind := range kinds {
		go func() { b.report(st.WatchKind(ctx, kind, events, state.WithBootstrapContents(true))) }()
	}

	f := follower{barest: b, node: node, missing: len(kinds)}

	for {
		select {
		case <-ctx.Done():
			return nil
		case event := <-events:
			if err := f.handle(ctx, event); err != nil {
				return err
			}
		}
	}
}

// follower is the state of one Node.
type follower struct {
	*barest

	node     *corev1.Node
	missing  int // kinds whose existing resources have not been read
	metadata *runtime.PlatformMetadataSpec
	ips      []string
}

func (f *follower) handle(ctx context.Context, event state.Event) error {
	switch r := event.Resource.(type) {
	case *runtime.PlatformMetadata:
		f.metadata = r.TypedSpec()
	case *network.AddressStatus:
		// All addresses of a simulated machine are those of its Node, also the loopback address where it listens.
		if event.Type != state.Destroyed {
			f.ips = append(f.ips, r.TypedSpec().Address.Addr().String())
		}
	}

	switch event.Type {
	case state.Errored:
		return event.Error
	case state.Bootstrapped:
		if f.missing--; f.missing == 0 {
			return f.initialize(ctx, f.node, f.metadata, f.ips)
		}
	case state.Created, state.Updated, state.Destroyed, state.Noop:
		if f.missing == 0 {
			return f.list(ctx, f.node.Name, f.ips)
		}
	}

	return nil
}

// initialize makes the same three writes as talos-ccm.
func (b *barest) initialize(ctx context.Context, node *corev1.Node, metadata *runtime.PlatformMetadataSpec, ips []string) error {
	if err := b.label(ctx, node.Name, metadata); err != nil {
		return err
	}

	if err := b.list(ctx, node.Name, ips); err != nil {
		return err
	}

	var taints []string

	for _, taint := range node.Spec.Taints {
		if taint.Key != cloudproviderapi.TaintExternalCloudProvider {
			taints = append(taints, fmt.Sprintf(`{"key":%q,"value":%q,"effect":%q}`, taint.Key, taint.Value, taint.Effect))
		}
	}

	spec := fmt.Sprintf(`{"spec":{"providerID":%q,"taints":[%s]}}`, metadata.ProviderID, strings.Join(taints, ","))
	_, err := b.client.CoreV1().Nodes().Patch(ctx, node.Name, types.MergePatchType, []byte(spec), metav1.PatchOptions{})

	return err
}

func (b *barest) list(ctx context.Context, nodename string, ips []string) error {
	addresses := []string{fmt.Sprintf(`{"type":"Hostname","address":%q}`, nodename)}
	for _, ip := range ips {
		addresses = append(addresses, fmt.Sprintf(`{"type":"InternalIP","address":%q}`, ip))
	}

	status := fmt.Sprintf(`{"status":{"addresses":[%s]}}`, strings.Join(addresses, ","))
	_, err := b.client.CoreV1().Nodes().PatchStatus(ctx, nodename, []byte(status))

	return err
}

func (b *barest) label(ctx context.Context, nodename string, metadata *runtime.PlatformMetadataSpec) error {
	node := applycorev1.Node(nodename).WithLabels(map[string]string{
		corev1.LabelTopologyRegion: metadata.Region, corev1.LabelTopologyZone: metadata.Zone, corev1.LabelInstanceTypeStable: metadata.InstanceType,
		corev1.LabelFailureDomainBetaRegion: metadata.Region, corev1.LabelFailureDomainBetaZone: metadata.Zone,
		corev1.LabelInstanceType: metadata.InstanceType,
	})

	_, err := b.client.CoreV1().Nodes().Apply(ctx, node, metav1.ApplyOptions{FieldManager: "barest", Force: true})

	return err
}
