package ccm

import (
	"context"
	"fmt"
	"sync"

	"k8s.io/cloud-provider/app"
	genericcontrollermanager "k8s.io/controller-manager/app"
	"k8s.io/controller-manager/pkg/clientbuilder"
	controllerhealthz "k8s.io/controller-manager/pkg/healthz"
	"k8s.io/klog/v2"

	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/provider"
	"github.com/talos-ccm/talos-ccm/pkg/reflector"
)

// control runs reflector and controllers until ctx ends and they have finished.
func (l *leader) control(ctx context.Context) error {
	inv := inventory.New(l.clock.Now)
	defer countMachines(inv)()

	var group sync.WaitGroup
	defer group.Wait()

	ctx, cancel := context.WithCancel(ctx)
	defer cancel()

	dial := l.dialer(ctx)
	refl := reflector.New(inv, dial, l.clock)

	if err := refl.FollowNodes(l.config.SharedInformers.Core().V1().Nodes()); err != nil {
		return err
	}

	controllerContext, err := app.CreateControllerContext(l.config, clientbuilder.SimpleControllerClientBuilder{ClientConfig: l.config.Kubeconfig}, ctx.Done())
	if err != nil {
		return fmt.Errorf("prepare controllers: %w", err)
	}

	c := controllers{leader: l, group: &group, inventory: inv, dial: dial}

	initializers := app.ConstructControllerInitializers(c.constructors(), l.config, provider.New(inv, l.nodeOptions))
	if err := l.start(ctx, controllerContext, initializers); err != nil {
		return err
	}

	group.Go(func() { refl.Run(ctx) })
	l.config.SharedInformers.Start(ctx.Done())
	controllerContext.InformerFactory.Start(ctx.Done())
	close(controllerContext.InformersStarted)

	<-ctx.Done()

	return nil
}

// start starts the controllers that are on.
func (l *leader) start(ctx context.Context, controllerContext genericcontrollermanager.ControllerContext, initializers map[string]app.InitFunc) error {
	logger := klog.FromContext(ctx)

	for name, initialize := range initializers {
		if !genericcontrollermanager.IsControllerEnabled(name, disabledByDefault(), l.config.ComponentConfig.Generic.Controllers) {
			continue
		}

		_, started, err := initialize(klog.NewContext(ctx, klog.LoggerWithName(logger, name)), controllerContext)
		if err != nil {
			return fmt.Errorf("start %s: %w", name, err)
		}

		if !started {
			logger.Info("Controller has nothing to do here", "controller", name)

			continue
		}

		logger.Info("Started controller", "controller", name)
		l.checks.AddHealthChecker(controllerhealthz.NamedPingChecker(name))
	}

	return nil
}
